"""Writes new plugin packages from templates, and the table of architectures in a README."""

from .package import KINDS, MEDIA, NewPackage, write_package

__all__ = ["KINDS", "MEDIA", "NewPackage", "write_package"]
