"""Where the time of a run would go if it were set otherwise: a model of the whole system, and a search over it."""
