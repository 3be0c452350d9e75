"""Modules that answer the calls of other stores, so that programs written for those run on Moontide."""
