"""The documentation site: README, docs/ and reference pages made from the code (`make docs`)."""
