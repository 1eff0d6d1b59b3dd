"""Every loss, one file each. ``LOSS_FNS`` is the recipe's union, the dispatch and the tests' parameter list at once."""
