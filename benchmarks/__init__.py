"""What bayesify costs and how good its methods are, measured."""
