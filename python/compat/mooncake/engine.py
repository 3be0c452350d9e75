"""There is no transfer engine here: Moontide moves bytes itself. Importing this says so.

The error names ``mooncake``, as it would if nothing of that name were installed: LMCache imports this module to see
what it can use, goes on without it after that error, and does not start after any other.
"""

raise ModuleNotFoundError(
    "moontide-mooncake-compat has mooncake.store, and no mooncake.engine: there is no transfer engine", name="mooncake"
)
