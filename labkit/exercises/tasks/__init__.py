"""One module for each exercise; what its names mean stands in `labkit.exercises.record`."""
