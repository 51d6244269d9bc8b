"""advise: which setting serves a longer context, why, and whether it does."""
