"""Stand-ins for a GPU and its libraries, with which tests rehearse GPU paths on a CPU."""
