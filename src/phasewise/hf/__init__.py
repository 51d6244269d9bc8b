"""Hugging Face transformers: the only part of the library that imports it."""
