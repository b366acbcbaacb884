"""Pure tensor functions over flat action tokens: advantages, policy losses, off-policy corrections."""
