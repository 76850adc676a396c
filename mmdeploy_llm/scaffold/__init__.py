"""A new plugin package from a template, and the table of architectures in a README."""

from .package import KINDS, NewPackage, write_package

__all__ = ["KINDS", "NewPackage", "write_package"]
