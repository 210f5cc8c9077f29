"""FinDEP: schedules of a layer's tasks over both groups, their makespan, and the search for the best."""
