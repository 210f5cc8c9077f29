"""FinDEP: schedules of a layer's tasks over both groups, and the search for the best."""
