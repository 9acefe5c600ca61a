"""A stand-in for scikit-learn, of which the scripts use a single data set."""
