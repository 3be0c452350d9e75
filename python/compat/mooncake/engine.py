"""There is no transfer engine: Moontide transfers bytes itself. The import of this module fails.

The error names ``mooncake``, as if no package of that name were installed: LMCache imports this module to detect the
engine, continues without it after this error, and does not start after any other error.
"""

raise ModuleNotFoundError(
    "moontide-mooncake-compat has mooncake.store, but no mooncake.engine (transfer engine)", name="mooncake"
)
