"""The manual page of every rule, as package data of ``healthcheck.rulepages``: ``healthcheck explain`` prints them."""
