"""What programs import from ``mooncake.store``; all of it is in ``moontide.compat.mooncake``."""

from moontide.compat.mooncake import *  # noqa: F403 - the same names, whatever they are
from moontide.compat.mooncake import __all__ as __all__
