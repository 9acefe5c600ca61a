"""The model: who trains which parameter, modes, running statistics, what its layers put out."""
