"""Starting, watching and stopping the roles of a run."""
