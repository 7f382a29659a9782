// `dependent_launch.cuh`: grids run one after another, so there is nothing to wait for, and caches are not modelled.
#pragma once

static void start_next() {}
static void wait_for_previous() {}
static void prefetch_line(unsigned long long) {}
static void prefetch_range(unsigned long long, unsigned long long) {}
