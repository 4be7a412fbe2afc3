"""Do two devices, engines or versions compute the same numbers, and if not, where does it begin: docs/alignment.md."""
