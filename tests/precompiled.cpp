// SPDX-License-Identifier: Apache-2.0
// A program for the options that the headers of precompiled.hpp are compiled with.
int main() {}
