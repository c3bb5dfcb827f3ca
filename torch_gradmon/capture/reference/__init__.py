"""A reference model beside the one that trains."""
