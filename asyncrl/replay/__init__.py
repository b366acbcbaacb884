"""The replay queue: admission, leases, finished groups, acknowledged commits and the ledger."""
