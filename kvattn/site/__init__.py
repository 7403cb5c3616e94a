"""The errors as a site: pages and JSON, written to a directory or served over HTTP."""
