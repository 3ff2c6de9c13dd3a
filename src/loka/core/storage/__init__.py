"""Files, and what is in them: atomic, checked, locked, bounded; JSON of dataclasses."""
