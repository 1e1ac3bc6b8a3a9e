// RUN: %opt %s -p 'strip-mine{budget=512}' | %filecheck %s

// Values at 64 points of two cells are squared and summed up against a table. A strip of them is
// enough at a time: only the table is viewed in place, and the sum, cleared before, is added to.

"memref.global"() <{sym_name = "table", type = memref<64x3xf64>, initial_value = dense<2.0> : tensor<64x3xf64>, sym_visibility = "private", constant, alignment = 64 : i64}> : () -> ()
func.func @loop(%start: i64, %stop: i64, %x: memref<?xf64>) {
  %table = memref.get_global @table : memref<64x3xf64>
  %pack = memref.alloca() {alignment = 64 : i64} : memref<2xf64>
  %points = memref.alloca() {alignment = 64 : i64} : memref<64x2xf64>
  %sum = memref.alloca() {alignment = 64 : i64} : memref<3x2xf64>
  %first = arith.index_cast %start : i64 to index
  %end = arith.index_cast %stop : i64 to index
  %zero = arith.constant 0.0 : f64
  %c2 = arith.constant 2 : index
  scf.for %block = %first to %end step %c2 {
    linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} outs(%pack : memref<2xf64>) {
    ^bb0(%old: f64):
      %cell = linalg.index 0 : index
      %value = memref.load %x[%cell] : memref<?xf64>
      linalg.yield %value : f64
    }
    linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%pack : memref<2xf64>) outs(%points : memref<64x2xf64>) {
    ^bb0(%a: f64, %old: f64):
      %q = linalg.index 0 : index
      %i = arith.index_cast %q : index to i64
      %f = arith.sitofp %i : i64 to f64
      %square = arith.mulf %a, %f : f64
      linalg.yield %square : f64
    }
    linalg.fill ins(%zero : f64) outs(%sum : memref<3x2xf64>)
    linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d1, d0)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d2)>], iterator_types = ["parallel", "reduction", "parallel"]} ins(%table, %points : memref<64x3xf64>, memref<64x2xf64>) outs(%sum : memref<3x2xf64>) {
    ^bb0(%a: f64, %b: f64, %c: f64):
      %product = arith.mulf %a, %b : f64
      %new = arith.addf %c, %product : f64
      linalg.yield %new : f64
    }
  }
  func.return
}

// CHECK:       %[[POINTS:.*]] = memref.alloca() {alignment = 64 : i64} : memref<16x2xf64>
// CHECK:       scf.for %block
// CHECK:         linalg.fill ins(%zero : f64) outs(%sum : memref<3x2xf64>)
// CHECK:         scf.for %[[START:.*]] = %{{.*}} to %{{.*}} step %{{.*}} {
// CHECK-NEXT:      linalg.generic
// CHECK-SAME:      outs(%[[POINTS]] : memref<16x2xf64>)
// CHECK:             %q = linalg.index 0 : index
// CHECK-NEXT:        %[[POINT:.*]] = arith.addi %q, %[[START]] : index
// CHECK-NEXT:        arith.index_cast %[[POINT]] : index to i64
// CHECK:           %[[PART:.*]] = memref.subview %table[%[[START]], 0] [16, 3] [1, 1] : memref<64x3xf64> to memref<16x3xf64, strided<[3, 1], offset: ?>>
// CHECK-NEXT:      linalg.generic
// CHECK-SAME:      ins(%[[PART]], %[[POINTS]] : memref<16x3xf64, strided<[3, 1], offset: ?>>, memref<16x2xf64>) outs(%sum : memref<3x2xf64>)
// CHECK-NOT:     memref<64x2xf64>
