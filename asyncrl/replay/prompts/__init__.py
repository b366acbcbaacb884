"""What the queue knows of each training row, and the choice of rows by it."""
