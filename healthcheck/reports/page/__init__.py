"""One HTML file that tells a run, or several."""
