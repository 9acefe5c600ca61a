"""Files and annotations for CI, all made from the content of ``report.json``."""
