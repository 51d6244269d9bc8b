"""What checkpoints and corpora ask of positions: measured values first, then reports."""
