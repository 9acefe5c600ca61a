"""How a loop is seen: one step machine and what feeds it, patches, the gate, ranks, resume, unmodified scripts."""
