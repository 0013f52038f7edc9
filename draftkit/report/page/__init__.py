"""Pages of results and of trainings, with their charts."""
