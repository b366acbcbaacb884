"""The OpenAI API for agent programs, whose turns are trained as they were sampled."""
