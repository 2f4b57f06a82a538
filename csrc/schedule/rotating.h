#pragma once

#include "gang_order.h"
#include "head_order.h"

namespace dash::schedule {

// Without a mask: KV tiles rotate in groups, each from a start of its own, so that no two of a group are ever at the
// same query tile and no reduction waits. (DASH's shift; the paper's order is that of one group with as many members
// as there are query tiles. Picture: cyclic_groups.h.)
//
// A group must be on the SMs as a whole. A side of the L2 cache has 66 of them, and groups that leave many of these
// over would cost what they leave, so groups are of a size that fits, and KV tiles that are none of a group wait in
// line: all descend, each behind the one before it. They are added first, and fill what groups leave over
// (gang_order.h).
//
//   KV tiles   group | ... | in line        The last KV tile of a head, which may have fewer keys and a mask, is the
//   ranks      after | ... | first          last one in line, where it holds up nobody of its kind.
//
// No deadlock: a chain in line waits for lower ones of the line, and a group for itself and for what was issued before.
struct Rotating {
    static constexpr char const* kName = "rotating";
    static constexpr bool kWaitsInLine = false;
    TileGrid grid;
    GangOrder order;

    DASH_HD explicit Rotating(TileGrid const& g) : grid(g), order(order_of(g)) {}

    DASH_HD int ways() const { return 1; }
    DASH_HD int visits(int /*kv_tile*/) const { return grid.q_tiles(); }

    DASH_HD int visit(int kv_tile, int step, int /*way*/) const {
        if (kv_tile >= order.cycle.members) return grid.q_tiles() - 1 - step;
        int const q_tile = order.cycle.start(kv_tile) + step;
        return q_tile < grid.q_tiles() ? q_tile : q_tile - grid.q_tiles();
    }

    DASH_HD int rank(int kv_tile, int q_tile, int /*way*/) const {
        if (kv_tile >= order.cycle.members) return kv_tile - order.cycle.members;
        return order.in_line + order.cycle.rank(kv_tile, q_tile, order.cycle.members);
    }

    // All chains have equally many visits, and are in step whatever the order.
    DASH_HD HeadOrder heads(int /*kv_tile*/, int /*group*/) const { return {1, grid.q_tiles(), false}; }

    DASH_HD Chain chain(int claim, int heads) const { return order.chain(claim, heads); }
    DASH_HD int cycle_end(int claim, int heads) const { return order.cycle_end(claim, heads); }
    DASH_HD int slot(int kv_tile) const { return kv_tile < order.cycle.members ? order.cycle.place(kv_tile) : 0; }
    DASH_HD int resident_ctas_needed() const { return min_of(order.cycle.group_size, order.cycle.members); }
    // What whole groups leave over, less what chains in line fill, since they are so large a part of all chains.
    DASH_HD int idle_ctas(int ctas) const {
        if (ctas < order.cycle.group_size) return 0;
        int const left_over = divide(ctas, order.cycle.group_size).rest;
        return max_of(0, left_over - ctas * order.in_line / max_of(1, grid.kv_tiles()));
    }

  private:
    // The groups of a head, by its shape alone, since the bits depend on them. Measured on H200 (docs/schedules.md).
    DASH_HD static GangOrder order_of(TileGrid const& g) {
        int const kv_tiles = g.kv_tiles(), q_tiles = g.q_tiles();
        GangOrder const all_rotate = {0, CyclicGroups(kv_tiles, 0, q_tiles), g.ctas_an_order};
        // One group, or so few chains that the line and the group would come one after the other and not fill the chip.
        if (kv_tiles <= 16 || kv_tiles * g.heads < kChainsThatFillAChip) return all_rotate;
        // Groups that are all of the head, and fill a side but for two CTAs.
        for (int size : {64, 32})
            if (size <= q_tiles && kv_tiles % size == 0)
                return {0, CyclicGroups(kv_tiles, 0, q_tiles, size), g.ctas_an_order};
        // Two, three, four or six groups fill a side, and members keep a distance. A part of the chains waits in line,
        // for what groups leave over on other chips; but a line longer than chains are would take longer than they do.
        for (int size : {33, 22, 16, 11}) {
            if (3 * size > 2 * q_tiles || 20 * size > 17 * kv_tiles) continue;
            int const most_in_line = 3 * q_tiles / 4, rest = max_of(0, kv_tiles - most_in_line);
            int const members = max_of(1, min_of(ceil_div(rest, size), kv_tiles / size)) * size;
            return {kv_tiles - members, CyclicGroups(members, 0, q_tiles, size), g.ctas_an_order};
        }
        return all_rotate;
    }
};

}  // namespace dash::schedule
