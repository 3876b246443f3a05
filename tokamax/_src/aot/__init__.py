"""Programs for TPUs that are not here, through their real compiler, ahead of time."""
