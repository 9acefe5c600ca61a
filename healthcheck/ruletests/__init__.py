"""Rule tests: series written in a short notation, played through the real engine, compared with what is expected."""
