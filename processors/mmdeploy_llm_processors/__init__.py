"""The parts that media processors of several families share, and the plugins that fetch media."""
