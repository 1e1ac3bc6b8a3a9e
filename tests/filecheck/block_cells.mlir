// RUN: %opt %s -p 'block-cells{width=4}' | %filecheck %s

// Work on all cells becomes a loop over blocks of four: shapes are static, the buffer goes around.
// The last block begins early enough to be whole, and its scatter leaves out what was done already.

func.func @loop(%start: i64, %stop: i64, %map: tensor<?xi32>, %y: tensor<?xf64>, %x: tensor<?xf64>) -> tensor<?xf64> {
  %first = arith.index_cast %start : i64 to index
  %end = arith.index_cast %stop : i64 to index
  %count = arith.subi %end, %first : index
  %empty = tensor.empty(%count) : tensor<2x?xf64>
  %pack = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} outs(%empty : tensor<2x?xf64>) {
  ^bb0(%old: f64):
    %slot = linalg.index 0 : index
    %cell = linalg.index 1 : index
    %entity = arith.addi %cell, %first : index
    %two = arith.constant 2 : index
    %row = arith.muli %entity, %two : index
    %at = arith.addi %row, %slot : index
    %target = tensor.extract %map[%at] : tensor<?xi32>
    %index = arith.index_cast %target : i32 to index
    %value = tensor.extract %x[%index] : tensor<?xf64>
    linalg.yield %value : f64
  } -> tensor<2x?xf64>
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %done = scf.for %cell = %c0 to %count step %c1 iter_args(%buffer = %y) -> (tensor<?xf64>) {
    %entity = arith.addi %cell, %first : index
    %two = arith.constant 2 : index
    %at = arith.muli %entity, %two : index
    %target = tensor.extract %map[%at] : tensor<?xi32>
    %index = arith.index_cast %target : i32 to index
    %value = tensor.extract %pack[%c0, %cell] : tensor<2x?xf64>
    %before = tensor.extract %buffer[%index] : tensor<?xf64>
    %after = arith.addf %before, %value : f64
    %next = tensor.insert %after into %buffer[%index] : tensor<?xf64>
    scf.yield %next : tensor<?xf64>
  }
  func.return %done : tensor<?xf64>
}

// CHECK:       func.func @loop(%{{.*}}: i64, %{{.*}}: i64, %[[MAP:.*]]: tensor<?xi32>, %[[Y:.*]]: tensor<?xf64>, %{{.*}}: tensor<?xf64>) -> tensor<?xf64> {
// CHECK:         %[[WIDTH:.*]] = arith.constant 4 : index
// CHECK:         %[[ALL:.*]] = scf.for %{{.*}} = %{{.*}} to %{{.*}} step %[[WIDTH]] iter_args(%[[CARRIED:.*]] = %[[Y]]) -> (tensor<?xf64>) {
// CHECK:           arith.minsi
// CHECK:           tensor.empty() : tensor<2x4xf64>
// CHECK-NEXT:      linalg.generic
// CHECK:             tensor.extract %[[MAP]]
// CHECK:           } -> tensor<2x4xf64>
// CHECK:           %[[BLOCK:.*]] = scf.for %[[CELL:.*]] = {{.*}} iter_args(%{{.*}} = %[[CARRIED]]) -> (tensor<?xf64>) {
// CHECK:             tensor.extract %{{.*}}[%{{.*}}, %[[CELL]]] : tensor<2x4xf64>
// CHECK:           scf.yield %[[BLOCK]] : tensor<?xf64>
// CHECK:         func.return %[[ALL]] : tensor<?xf64>
// CHECK-NOT:   tensor<2x?xf64>
