"""Name the module in which a step stopped being finite, by making the step again."""
