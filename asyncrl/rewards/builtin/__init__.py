"""The rewards that come with the package."""
