"""Brings modules of transformers into models of the engine: whole models for transformers_any,
single towers for families whose decoder is native."""
