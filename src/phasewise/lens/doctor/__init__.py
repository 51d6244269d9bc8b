"""What is silently wrong with a checkpoint's positions."""
