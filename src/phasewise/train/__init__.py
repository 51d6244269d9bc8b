"""Training, and comparing what was trained."""
