"""The rule packs that ship with healthcheck, as package data of ``healthcheck.rulepacks``."""
