"""HTTP front, Serve application and Ray session."""
