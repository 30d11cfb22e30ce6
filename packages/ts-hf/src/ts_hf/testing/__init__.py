"""Small models of many families, and what is checked on each; for tests and for docs/models.md.

Imported by nothing at run time.
"""

from __future__ import annotations

from ts_hf.testing.families import FAMILIES, VOCABULARY, Family, token_batch

__all__ = ["FAMILIES", "VOCABULARY", "Family", "token_batch"]
