"""Agent programs as environments: they own the loop, and call the policy through the gateway."""
