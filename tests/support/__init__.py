"""What the tests stand on: private servers, a cutting proxy, real worker processes, ways to wait without sleeping."""
