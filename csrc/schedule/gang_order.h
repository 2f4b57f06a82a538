#pragma once

#include "cyclic_groups.h"

namespace dash::schedule {

// The order of issue where some KV tiles of a head rotate in groups and the others wait in line before them.
//
// A group is issued as a gang: as many groups as have room on the CTAs make a wave, and the CTAs that they leave over
// take chains in line. Chains in line come before all groups of their head in every sum, so those of the first heads
// are issued ahead, and as many more as the waves have no room for.
//
//   8 CTAs, 2 heads, each 2 KV tiles in line (l) and 2 groups of 3:
//
//     ahead     0l0 0l1
//     wave      0a0 0a1 0a2  0b0 0b1 0b2   1l0 1l1       groups a and b of head 0
//     wave      1a0 1a1 1a2  1b0 1b1 1b2
//
// The second group of a head meets the first one at every query tile, so heads come in blocks of as many as have room
// in a wave: the first groups of all heads of a block, then the second ones. Heads that are left over belong to the
// last block.
struct GangOrder {
    int in_line;  // KV tiles of a head: those behind the groups
    CyclicGroups cycle;
    int ctas;

    struct Waves {
        int groups;  // in a wave
        int spare;   // CTAs that they leave over
        int filled;  // waves that have chains in line on those, the first ones
        int ahead;   // chains in line before the first wave
    };

    // Block b begins with wave b * (groups of a head). The chains in line of its heads must be issued by then:
    // (b + 1) * waves.groups * in_line of them. That grows evenly with b, as does what waves have room for, so it is
    // enough to ask for it at the first block and at the last one.
    DASH_HD Waves waves(int heads) const {
        int const size = cycle.group_size;
        int const groups = max_of(1, min_of(quotient(ctas, size), heads));
        int const spare = max_of(0, ctas - groups * size), blocks = quotient(heads, groups);
        int filled = 0;
        if (in_line > 0 && spare > 0)
            filled = min_of(quotient((heads - groups) * in_line, spare), (blocks - 1) * cycle.groups());
        return {groups, spare, filled, heads * in_line - filled * spare};
    }

    DASH_HD Chain chain(int claim, int heads) const {
        Place const place = this->place(claim, heads);
        if (place.in_line >= 0) {
            Division const head = divide(place.in_line, in_line);
            return {head.quotient, cycle.members + head.rest};
        }
        Chain const c = cycle.chain(place.rotating, place.heads);
        return {place.first_head + c.head, c.kv_tile};
    }

    DASH_HD int cycle_end(int claim, int heads) const {
        Place const place = this->place(claim, heads);
        if (place.in_line >= 0) return claim + 1;
        return claim + cycle.cycle_end(place.rotating, place.heads) - place.rotating;
    }

  private:
    struct Place {
        int in_line;   // which one of all chains in line, or -1
        int rotating;  // which one of the chains in groups of its block
        int first_head, heads;
    };

    DASH_HD Place place(int claim, int heads) const {
        Waves const w = waves(heads);
        if (claim < w.ahead) return {claim, 0, 0, 0};
        claim -= w.ahead;
        int const gangs = w.groups * cycle.group_size, wave_claims = gangs + w.spare;
        if (claim < w.filled * wave_claims) {
            Division const wave = divide(claim, wave_claims);
            if (wave.rest >= gangs) return {w.ahead + wave.quotient * w.spare + wave.rest - gangs, 0, 0, 0};
            claim = wave.quotient * gangs + wave.rest;
        } else {
            claim -= w.filled * w.spare;
        }
        int const block_claims = w.groups * cycle.members, last = quotient(heads, w.groups) - 1;
        int const block = min_of(quotient(claim, block_claims), last), first_head = block * w.groups;
        return {-1, claim - block * block_claims, first_head, block < last ? w.groups : heads - first_head};
    }
};

}  // namespace dash::schedule
