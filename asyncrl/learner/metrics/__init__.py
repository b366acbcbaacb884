"""What a learner measures of its steps."""
