"""Live traffic: answers people, and puts every answer, sealed for its person, into `production-rollouts`."""
