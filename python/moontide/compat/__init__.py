"""Modules that implement the APIs of other stores, so that programs written for them run on Moontide."""
