"""The module ``mooncake.store``; its implementation is ``moontide.compat.mooncake``."""

from moontide.compat.mooncake import *  # noqa: F403 - exports the same names
from moontide.compat.mooncake import __all__ as __all__
