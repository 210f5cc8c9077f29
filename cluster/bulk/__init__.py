"""The bulk job: rows of files, classified once each, whatever dies in between."""
